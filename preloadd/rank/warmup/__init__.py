"""What a rank does so that engines start fast: tables, compiled code, a rehearsal of a start."""
