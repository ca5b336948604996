"""The wire, without any I/O: messages, state machines, payload encoding."""
