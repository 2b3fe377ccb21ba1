"""OpenAI's Responses API: stored responses and conversations, and responses generated in the background."""
