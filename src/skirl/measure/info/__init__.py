"""`skirl info`: say what a file or a folder is. It only reads."""
