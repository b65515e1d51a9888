"""The waits: one spec becomes one awaitable, with deadlines and limits."""
