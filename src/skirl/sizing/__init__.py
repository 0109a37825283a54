"""How much cache a run needs, and what a file or a folder is: `skirl size` and `skirl info`."""
