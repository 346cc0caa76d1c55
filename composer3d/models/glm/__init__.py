"""GLM-4.5 and GLM-4.6: heads of which a part is rotated, and experts as in DeepSeek-V3.

``models.moe`` has the blocks, and ``models.deepseek`` the multi-token prediction.
"""
