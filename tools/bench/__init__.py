"""What ``tools/bench.py`` runs. Every measured run is a fresh process; nothing is timed in the bench's own."""
