"""What statistics say, for people: text, one HTML page, JSON, several runs side by side.

account     a run's files, added up over ranks and starts of training: calls, matrix, curve
document    everything that is shown, as plain values: the --json
text        that for a terminal; its sections are a list
page        that for a browser, with the figures: one per file; their list is in figures
compare     the documents of several runs side by side
"""
