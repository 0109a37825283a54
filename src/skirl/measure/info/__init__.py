"""`skirl info`: what a file or a folder is; it reads, and changes nothing."""
