"""How a step's time grows with trainers: what they give each other, counted, and what a machine and a link take for it."""
