"""What a run will cost, before it starts: simulated timelines and their drawings."""
