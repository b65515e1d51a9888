"""What to do: pure, frozen, tested without a loop. Imports nothing above it."""
