"""DeepSeek-V2 and DeepSeek-V3: multi-head latent attention, and mixtures of experts.

``attention`` is the new layer. Experts are those of ``models.moe``; norms, embedding and head are
those of ``models.llama``.
"""
