"""Data parallelism: parameters are sharded and replicated by FSDP2."""
