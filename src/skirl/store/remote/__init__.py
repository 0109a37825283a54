"""Rows on other machines: a store whose parts are served by memory nodes, over PyTorch RPC."""
