"""A store on other machines, whose parts are served by memory nodes over PyTorch RPC."""
