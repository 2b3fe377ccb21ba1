"""Who calls: keys, the rights that each route asks for, and quotas."""
