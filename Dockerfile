# memagent serve, in front of a model server.
#
#     docker build -t memagent .
#     docker run -p 127.0.0.1:8080:8080 -v memagent:/data -e MEMAGENT_KEYS=alice:KEY memagent \
#         --server-name localhost --base-url http://MODEL-SERVER:8000/v1
#
# EXTRAS=serve,files,hub,local adds torch, with which it reads without a model server.
FROM python:3.11-slim

ARG EXTRAS=serve,files,hub
COPY pyproject.toml constraints/development.txt README.md LICENSE /source/
COPY memagent_graph /source/memagent_graph
COPY training /source/training
COPY integrations /source/integrations
RUN pip install --no-cache-dir --constraint /source/development.txt "/source[$EXTRAS]" \
    && rm -r /source \
    && useradd --system --home-dir /data --create-home memagent

USER memagent
ENV MEMAGENT_HOME=/data
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["memagent", "serve", "--host", "0.0.0.0"]
