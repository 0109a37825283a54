"""Trainers: processes that train one model together, find each other, exchange rows and sum their gradients."""
