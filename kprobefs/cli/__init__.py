"""The commands of the program, and the parser of its command line."""
