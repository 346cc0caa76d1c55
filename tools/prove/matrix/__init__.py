"""The covering matrix: the layouts to prove (``cover``), and the report about them (``report``)."""
