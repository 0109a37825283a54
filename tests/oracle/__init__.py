"""The oracle, compared with short and slow Python that shares no code with it."""
