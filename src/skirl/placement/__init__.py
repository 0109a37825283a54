"""Where rows are to live: counted where they move, and planned from that. Nothing here moves a row."""
