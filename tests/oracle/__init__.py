"""The oracle, against short and slow Python that shares no line with it."""
