"""What statistics say, for people: text, one HTML page, JSON, several runs side by side.

account     a run's files, added up over ranks and starts of training
document    everything that is shown, as plain values: the --json; findings: what is said in words
text        that for a terminal; its sections are a list
page        that for a browser, with the figures; their list is in figures, they are drawn by svg
compare     the documents of several runs side by side
"""
