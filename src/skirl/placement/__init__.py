"""Planning where rows live, from counts of the rows that move. Nothing here moves a row."""
