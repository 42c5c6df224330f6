"""The tags on a World's communicators: apart, as ranks that have gone on without a lost one have only one of these."""

#: Of the letters of a roll call (watchdog.py).
QUESTION, ANSWER, FAREWELL, GAVE_UP = LETTERS = (1, 2, 3, 4)
#: Of a shared counter that rank 0 keeps (counter.py).
ASK, TICKET = 5, 6
#: Of collectives of a few numbers (small_messages.py): the first two from there on one for each round.
MINIMUM, LEAVING, BROADCAST = 1000, 1100, 1200
#: The first of those that transports use.
DATA = 2048
