"""What outlives a request: responses, conversations, files and batches, in SQLite files."""
