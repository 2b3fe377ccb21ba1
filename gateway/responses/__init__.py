"""OpenAI's Responses API: conversations and responses that are kept, and answers that come in the background."""
