"""The recipes of the policies that ship: their data, their training, their measurement. Not a library."""
