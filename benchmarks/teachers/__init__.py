"""Does the teacher know more than the model it is to teach?"""
