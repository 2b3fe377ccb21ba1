"""OpenAI's files and batches.  Requests from a file run in this process beside interactive ones; answers go to files."""
