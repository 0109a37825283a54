"""Processes that train one model together: how they find each other, what they exchange, how their gradients are summed."""
