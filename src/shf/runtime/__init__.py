"""What a step switches on and off around itself, and what can go wrong meanwhile."""
