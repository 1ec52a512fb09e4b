"""What the exercises of each chapter are checked against.  Given."""
