"""Our own vLLM server, and loading new weights into the server that reads."""
