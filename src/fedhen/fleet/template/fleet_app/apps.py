"""The apps of the server and of the nodes. Usually there is nothing to change here."""

from fedhen.fleet.app import App
from fedhen.fleet.apps import client_app, server_app
from fleet_app import data

APP = App(data.training_data, data.test_data, data.INPUTS, data.CLASSES)
client = client_app(APP)
server = server_app(APP)
