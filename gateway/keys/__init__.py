"""Who calls: keys, what each may use, and how much of it."""
