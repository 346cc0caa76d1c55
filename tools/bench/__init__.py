"""Benchmarks. Every measured run is a fresh process; nothing runs in the bench's own process."""
