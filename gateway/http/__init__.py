"""What every request passes: the application and its server, middleware, errors, event streams."""
