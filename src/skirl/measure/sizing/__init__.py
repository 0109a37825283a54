"""How much cache does my data need: a survey of the ids, the planner run over it, and what to choose."""
