"""OLMo 2 and 3: decoders whose norms come after attention and feed-forward, and span all heads.

``models.llama`` has the rest: positions, projections, feed-forward, embedding and head.
"""
