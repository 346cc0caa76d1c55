"""The covering matrix: which layouts are proven (``cover``), and what is written about them."""
