"""OpenAI's files and batches: requests from a file, carried out in process beside interactive ones, answers into files."""
