/** Shows this server's API in Swagger UI, without requests to other servers. */

globalThis.SwaggerUIBundle({
  url: new URL("openapi.json", document.baseURI).href,
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
});
