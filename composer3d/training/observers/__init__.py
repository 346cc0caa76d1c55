"""What watches a training: none of it changes a number that is computed."""
