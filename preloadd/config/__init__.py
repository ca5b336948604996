"""What operators write, validated once and whole; nothing deeper sees an unchecked value."""
