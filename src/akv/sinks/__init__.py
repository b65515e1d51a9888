"""What becomes of events: log lines, a file, numbers. One sink a file."""
