"""What an event log tells: of one request, of all of them, and of this moment.

``reading`` is the only module that opens a file, and ``page`` the only one that
draws with somebody else's library. Everything else is pure: records in, frozen
values or lines of text out.
"""
