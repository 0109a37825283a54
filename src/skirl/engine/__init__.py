"""Rows on the device: slots, the moves that a Step asks for, and the kernels that compute on them."""
