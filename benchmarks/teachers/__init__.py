"""Is the teacher more accurate than the model it teaches?"""
