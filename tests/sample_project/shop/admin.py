"""The shop's own admin, on Django's default site."""

from django.contrib import admin

from shop.models import Order, Person


@admin.register(Person)
class PersonAdmin(admin.ModelAdmin):
    list_display = ["email", "is_staff"]
    fields = ["email", "is_staff", "is_active"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["__str__", "customer", "total"]
