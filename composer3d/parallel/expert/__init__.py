"""Expert parallelism: experts on several ranks, and the exchange of tokens between them."""
