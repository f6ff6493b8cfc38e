"""Study files, archives of their numbers, and the result pages that are made of them. Not in the wheel."""
