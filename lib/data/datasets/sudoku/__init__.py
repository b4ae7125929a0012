"""Sudoku: boards, a solver that proves, a generator that grades, and the files of both."""
