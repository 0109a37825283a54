"""Memory of many models: a step of all variants is captured, simulated, planned under a limit, and run as planned."""
